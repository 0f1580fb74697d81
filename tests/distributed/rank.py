"""One rank of several: `python -m tests.distributed.rank RANK WORLD FOLDER`; rank 0 writes what all ranks found.

Ranks meet by a file in the folder and talk over the loopback interface, by gloo.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.cases import CONFIGS, SCHEMA, Answers, answers


def gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    """The parts of all ranks, one after another along dim; they may differ in length there."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([part.shape[dim]]))
    longest = max(int(n) for n in lengths)
    padded = part.new_zeros(*part.shape[:dim], longest, *part.shape[dim + 1 :])
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([x.narrow(dim, 0, int(n)) for x, n in zip(parts, lengths, strict=True)], dim)


def by_heads(name: str, rank: int, world: int) -> Answers:
    """Tensor parallelism: every rank has all layers of its KV heads."""
    heads = SCHEMA.kv_heads(rank, world)
    found = answers(SCHEMA.shard(rank, world), CONFIGS[name], heads, range(SCHEMA.n_layers))
    return {"out": gathered(found["out"], 2), **{key: gathered(found[key], 1) for key in ("rows", "scores")}}


def by_layers(name: str, rank: int, world: int) -> Answers:
    """Pipeline parallelism: every rank has all heads of its layers."""
    layers = SCHEMA.layers(rank, world)
    found = answers(SCHEMA.stage(rank, world), CONFIGS[name], slice(0, SCHEMA.n_kv_heads), layers)
    return {key: gathered(value, 0) for key, value in found.items()}


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world)
    try:
        found = {(how.__name__, name): how(name, rank, world) for how in (by_heads, by_layers) for name in CONFIGS}
        if rank == 0:
            torch.save(found, folder / "found.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
