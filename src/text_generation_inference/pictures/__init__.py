"""Pictures on their way to the engine: fetched, decoded, resized as a model's family does it, kept by digest.

Never torch. Bytes of strangers are decoded in processes of their own (`worker`), which hand back uint8 pixels; values
are scaled and normalised on the device. `rules/` has a file for each way of preprocessing.
"""
