"""The engine process as a program: see `process`."""

from text_generation_inference.collection import pause_collection

if __name__ == "__main__":
    pause_collection()
    from text_generation_inference.engine.process import run

    run()
