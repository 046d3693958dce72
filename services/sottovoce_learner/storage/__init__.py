"""Durable state of a learner: write-ahead log, snapshots, privacy ledger, high-water mark, their verification and recovery."""
