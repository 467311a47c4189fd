"""Python commands that a test starts, and those that they start, as copies of a process that has imported other packages.

A new process takes up to ten seconds for that. This package, and the hosts that it changes, a command imports itself. The
fixture ``forked`` of conftest.py chooses it.
"""

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import torch

IMPORTED = "accelerate datasets matplotlib.pyplot numba pandas peft pyarrow rich.console scipy.stats sklearn.metrics "
IMPORTED += (
    "torch._dynamo torch._inductor.compile_fx torch.distributed.fsdp torch.distributed.run transformers.modeling_utils"
)
# What every Python has in sys.path.
EVERY = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
_STATUS = struct.Struct("i")
_server: socket.socket | None = None


def serve() -> None:
    """Start the process that is copied. It ends with this one, and with what was started of it."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL)
        theirs.close()


class Forked(subprocess.Popen):
    """A process of ``python [-u]`` with ``-m MODULE``, ``-c CODE`` or a script is a copy; of anything else a new one."""

    _status: int | None = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        words = [os.fspath(word) for word in ([args] if isinstance(args, (str, bytes)) else args)]
        options = [word for word in words[1:3] if word.startswith("-")]
        if words[0] != sys.executable or options not in (["-u"], ["-u", "-m"], ["-m"], ["-c"], []):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes = rest[3:9]
        files = [number if file == -1 else file for number, file in enumerate((p2cread, c2pwrite, errwrite))]
        self._status, theirs = os.pipe()
        environment = dict(os.environ if env is None else env)
        request = words[1:], environment, os.fspath(cwd or os.getcwd()), rest[14], (0, 1, 2, *pass_fds)
        socket.send_fds(_server, [pickle.dumps(request)], [*files, *pass_fds, _server.fileno(), theirs])
        os.close(theirs)
        self._close_pipe_fds(*pipes)
        # By then it has a session of its own.
        (self.pid,) = _STATUS.unpack(os.read(self._status, _STATUS.size))
        self._child_created = True

    def _waited(self, pid, flags):
        if self._status is None:
            return os.waitpid(pid, flags)
        if flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        (status,) = _STATUS.unpack(os.read(self._status, _STATUS.size))
        os.close(self._status)
        return pid, status

    def _try_wait(self, flags):
        return self._waited(self.pid, flags)

    def _internal_poll(self, _deadstate=None):
        return super()._internal_poll(_deadstate, self._waited)


def _main(asked: socket.socket) -> None:
    subprocess.Popen = Forked
    # Of torch.multiprocessing.spawn().
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")
    for name in IMPORTED.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # as in conftest.py
    while True:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        request, files, *_ = socket.recv_fds(asked, 1 << 20, 64)
        if not request:
            return
        # Between the two stands one that waits for the command, of which the test is not the parent.
        if os.fork() == 0:
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            command = os.fork()
            if command == 0:
                _become(*pickle.loads(request), files)
            *files, status = files
            for file in files:
                os.close(file)
            with contextlib.suppress(BrokenPipeError):
                os.write(status, _STATUS.pack(os.waitpid(command, 0)[1]))
            os._exit(0)
        for file in files:
            os.close(file)


def _become(words, environment, folder, session, numbers, files) -> None:
    """Make this copy the process of a command, and end with it."""
    global _server
    if session:
        os.setsid()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for file in files]
    for file in files:
        os.close(file)
    *moved, server, status = moved
    for number, file in zip(numbers, moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    _server = socket.socket(fileno=server)
    os.write(status, _STATUS.pack(os.getpid()))
    os.close(status)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    np.random.seed()
    torch.set_num_threads(1)  # it has none of the threads of OpenMP
    code = _run(words)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(code & 0xFF)


def _run(words: list[str]) -> int:
    """Run it as Python does; the exit code."""
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        del words[0]
    how = words.pop(0) if words[0] in ("-m", "-c") else ""
    first = {"-m": os.getcwd(), "-c": ""}.get(how, os.path.dirname(os.path.realpath(words[0])))
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *EVERY]
    sys.argv[:] = [how, *words[1:]] if how else words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    try:
        if how == "-m":
            sys.modules.pop(words[0], None)  # else it is said to be there already
            runpy._run_module_as_main(words[0])
        elif how == "-c":
            exec(compile(words[0], "<string>", "exec"), main.__dict__)
        else:
            main.__file__ = os.path.abspath(words[0])
            exec(compile(Path(words[0]).read_bytes(), main.__file__, "exec"), main.__dict__)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        # From what is run on.
        trace = error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
