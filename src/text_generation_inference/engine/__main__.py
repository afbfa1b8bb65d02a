"""The engine process as a program: see `process`."""

from text_generation_inference.collection import pause_collection
from text_generation_inference.engine.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before torch, which takes long to import
    pause_collection()
    from text_generation_inference.engine.process import run

    run()
