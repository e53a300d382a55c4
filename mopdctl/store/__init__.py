"""The rollout store: light metadata and heavy payload in Parquet, a token write-ahead log, commits that never tear."""
