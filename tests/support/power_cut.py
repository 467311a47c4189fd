"""What a killed process or a power cut leaves of the files that a function writes: folders to try again with.

After a kill everything is there that was done. After a power cut only that is certain which had been synced: the content of
a file by its fsync, names by the fsync of their folder. Of all else any part may be there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from pylate_fastmaxsim.files import replace

EVENTS = "fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir"


@dataclass(eq=False)
class Node:
    """The content of a file, or what stands under each name of a folder: now, and as of the last fsync (None: never)."""

    now: bytes | dict[str, Node] | None = None
    synced: bytes | dict[str, Node] | None = None


def is_folder(node: Node) -> bool:
    return isinstance(node.now, dict)


# Names that change at once, as of a rename: the folder, the name, and what stands there afterwards.
Change = list[tuple[Node, str, "Node | None"]]
State = dict[str, "bytes | None"]  # content by path, None for folders


@dataclass
class Disk:
    """What is under a folder, now and for certain."""

    root: Path
    top: Node = field(default_factory=lambda: Node({}, {}))
    pending: list[Change] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)  # by inode

    def look(self) -> None:
        """Note what has changed since the last look."""
        found, changes = {}, []
        self._look(self.root, self.top, found, changes)
        self.nodes = found
        while changes:
            group = [changes.pop()]
            nodes = {id(each) for _, _, *pair in group for each in pair if each is not None}
            # What has another name now was renamed, which happens at once; an exchange is two of them.
            group += [each for each in changes if nodes & {id(node) for node in each[2:] if node is not None}]
            changes = [each for each in changes if each not in group]
            self.pending.append([(folder, name, new) for folder, name, _, new in group])

    def _look(self, path: Path, folder: Node, found: dict, changes: list) -> None:
        names = {}
        for each in sorted(path.iterdir()):
            inode = each.stat().st_ino
            node = self.nodes.get(inode) or found.get(inode) or (Node({}, {}) if each.is_dir() else Node())
            names[each.name] = found[inode] = node
            if is_folder(node):
                self._look(each, node, found, changes)
            else:
                node.now = each.read_bytes()
        for name in sorted(names.keys() | folder.now):
            if names.get(name) is not folder.now.get(name):
                changes.append((folder, name, folder.now.get(name), names.get(name)))
        folder.now = names

    def sync(self, descriptor: int) -> None:
        node = self.top if os.fstat(descriptor).st_ino == self.root.stat().st_ino else None
        node = node or self.nodes.get(os.fstat(descriptor).st_ino)
        if node is not None and not is_folder(node):
            node.synced = node.now
        elif node is not None:
            for change in self.pending:
                if any(folder is node for folder, _, _ in change):
                    for folder, name, new in change:
                        _set(folder.synced, name, new)
            self.pending = [each for each in self.pending if all(folder is not node for folder, _, _ in each)]

    def sync_all(self) -> None:
        """As if the disk had been written long ago."""
        self.pending = []
        for node in (self.top, *self.nodes.values()):
            node.synced = dict(node.now) if is_folder(node) else node.now

    def after_a_kill(self) -> State:
        return dict(_paths(self.top, lambda folder: folder.now, lambda file: file.now))

    def after_a_power_cut(self, chance: random.Random) -> State:
        """One of the states that may be found."""
        share, names, contents = chance.choice((0.0, 0.5, 1.0)), {}, {}
        for change in self.pending:
            if chance.random() < share:
                for folder, name, new in change:
                    _set(names.setdefault(id(folder), dict(folder.synced)), name, new)

        def content(file: Node) -> bytes:
            return contents.setdefault(id(file), _content(file, chance))

        return dict(_paths(self.top, lambda folder: names.get(id(folder), folder.synced), content))


def _set(names: dict, name: str, new: Node | None) -> None:
    if new is None:
        names.pop(name, None)
    else:
        names[name] = new


def _paths(folder: Node, names: Callable, content: Callable, inside: str = "") -> Iterator[tuple[str, bytes | None]]:
    for name, node in sorted(names(folder).items()):
        yield inside + name, None if is_folder(node) else content(node)
        if is_folder(node):
            yield from _paths(node, names, content, f"{inside}{name}/")


def _content(file: Node, chance: random.Random) -> bytes:
    if file.synced == file.now:
        return file.now
    lost = file.now[: chance.randint(0, len(file.now))]
    # What was synced stays, if it was only added to or cut off.
    kept = file.synced or b""
    if file.now.startswith(kept) or kept.startswith(file.now):
        lost = file.now[: chance.randint(min(len(kept), len(file.now)), len(file.now))]
    return chance.choice((kept, lost, file.now, lost + bytes(len(file.now) - len(lost))))


def content(folder: Path) -> State:
    """What is under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def written(state: State, folder: Path) -> Path:
    """A state as files under a new folder."""
    folder.mkdir()
    for name, content in sorted(state.items()):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return folder


def states(root: Path, write: Callable[[], None], cuts: int, seed: int = 0) -> list[tuple[str, State]]:
    """States that a kill before each event of ``write`` leaves, and ``cuts`` power cuts there; then one cut at its end.

    States that are equal come once.
    """
    chance, found, disk, fsync = random.Random(seed), {}, Disk(root), os.fsync
    disk.look()
    disk.sync_all()

    def event(stock: Callable) -> Callable:
        def call(*args, **kwargs):
            disk.look()
            left = [("kill", disk.after_a_kill()), *(("cut", disk.after_a_power_cut(chance)) for _ in range(cuts))]
            for kind, state in left:
                found.setdefault(frozenset(state.items()), (kind, state))
            result = stock(*args, **kwargs)
            if stock is fsync:
                disk.sync(*args)
            disk.look()
            return result

        return call

    # Events within an event, as of rmtree, count as well.
    events = {name: event(getattr(os, name)) for name in EVENTS}
    # The system's exchange of two folders, for which os has no function whose calls could be seen.
    exchanged = event(replace._exchange)
    with mock.patch.multiple(os, **events), mock.patch.object(replace, "_exchange", exchanged):
        write()
    disk.look()
    return [*found.values(), *(("end", disk.after_a_power_cut(chance)) for _ in range(cuts))]
