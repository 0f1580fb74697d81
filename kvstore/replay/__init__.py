"""Which blocks decoding reads, recorded once and replayed through buffer pools of every size and policy."""
