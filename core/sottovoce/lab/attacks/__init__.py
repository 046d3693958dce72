"""What somebody who hears messages can make of them: records rebuilt, and membership guessed.

Pure functions on transcripts. That an attack fails proves nothing: guarantees are in `sottovoce.privacy`.
"""
