"""The KV cache of Hugging Face transformers models in a store: `StoreCache` and `use_store_attention`.

Importing it registers nothing and changes nothing in transformers.
"""

from kvstore.adapters.hf.attention import register, store_attention, use_store_attention
from kvstore.adapters.hf.cache import StoreCache, open_store
from kvstore.adapters.hf.compat import cache_argument
from kvstore.adapters.hf.schema import schema_of

__all__ = [
    "StoreCache",
    "cache_argument",
    "open_store",
    "register",
    "schema_of",
    "store_attention",
    "use_store_attention",
]
