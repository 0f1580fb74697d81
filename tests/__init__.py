"""Tests; oracles and builders that several of them share are importable from here."""
