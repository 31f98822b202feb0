"""Samples: what they are, how they become shards, where shards lie on disk, how one sample is read."""
