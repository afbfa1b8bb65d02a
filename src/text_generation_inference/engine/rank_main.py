"""A further rank as a program: see `rank_process`."""

from text_generation_inference.collection import pause_collection
from text_generation_inference.engine.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before torch, which takes long to import
    pause_collection()
    from text_generation_inference.engine.rank_process import run

    run()
