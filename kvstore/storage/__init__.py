"""What lies below the store on disk: records, tiers that keep them, the lock, the manifest and the catalog.

Nothing here knows the store, the index, or torch. Nothing here pickles, and nothing is believed before it is checked.
"""
