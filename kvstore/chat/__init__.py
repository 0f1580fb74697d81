"""Conversations that are kept in a store: every turn goes on from the rows that are there."""
