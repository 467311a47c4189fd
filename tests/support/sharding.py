"""The ways to wrap a model on several CPU processes."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers

data_parallel = DistributedDataParallel


def fully_sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in encoder_layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def encoder_sharded(model):
    fully_shard(model[0].auto_model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def flat_sharded(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
