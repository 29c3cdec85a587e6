"""What a plan costs in time and memory: arithmetic, communication, overlap, pipeline, memory, and the step they make.

Every function takes `Points` (plans of models on devices, one a place of its arrays) and gives an array of the same
length, so that a whole search space is computed at once.
"""
