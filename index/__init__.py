"""Secondary indexes over the keys of a table.

Names are imported on first use, so that importing the package compiles and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.index.base import Candidates as Candidates
    from kvstore.index.base import Index as Index
    from kvstore.index.clustering import kmeans as kmeans
    from kvstore.index.codebook import Codebook as Codebook
    from kvstore.index.faiss_index import FaissIndex as FaissIndex
    from kvstore.index.flat import FlatIndex as FlatIndex
    from kvstore.index.page import PageIndex as PageIndex
    from kvstore.index.pq import PQIndex as PQIndex
    from kvstore.index.rabitq import RaBitQIndex as RaBitQIndex
    from kvstore.index.registry import index_kinds as index_kinds
    from kvstore.index.registry import make_index as make_index
    from kvstore.index.registry import register_index as register_index
    from kvstore.index.rope import RopeSpec as RopeSpec
    from kvstore.index.rows import RowView as RowView
    from kvstore.index.scalar import ScalarIndex as ScalarIndex
    from kvstore.index.sparq import SparQIndex as SparQIndex
    from kvstore.index.warming import warmup as warmup
    from kvstore.index.weighting import Weighting as Weighting
    from kvstore.index.weighting import query_moments as query_moments
    from kvstore.index.workspace import Workspace as Workspace

_HOMES = {
    "Candidates": "base",
    "Codebook": "codebook",
    "FaissIndex": "faiss_index",
    "FlatIndex": "flat",
    "Index": "base",
    "PQIndex": "pq",
    "PageIndex": "page",
    "RaBitQIndex": "rabitq",
    "RopeSpec": "rope",
    "RowView": "rows",
    "ScalarIndex": "scalar",
    "SparQIndex": "sparq",
    "Weighting": "weighting",
    "Workspace": "workspace",
    "index_kinds": "registry",
    "kmeans": "clustering",
    "make_index": "registry",
    "query_moments": "weighting",
    "register_index": "registry",
    "warmup": "warming",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
