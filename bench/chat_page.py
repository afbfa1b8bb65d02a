"""What the chat page weighs and how soon a browser shows it, against a real server with the embedded model.

Needs what `tests/page/page_tools.py` installs. `--picture docs/page.webp` also takes the picture that opens README.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "api"), str(ROOT / "tests" / "page")]

from page_tools import find_chromium, what_is_missing  # noqa: E402
from PIL import Image  # noqa: E402
from serving import Server  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", help="file for a picture of the page")
    options = parser.parse_args()
    if missing := what_is_missing():
        sys.exit(missing)
    server = Server("--max-total-tokens", "4096")
    try:
        given = json.dumps({"server": server.url, "chromium": find_chromium()})
        script = ROOT / "tests" / "page" / "figures.mjs"
        taken = Path(tempfile.gettempdir()) / f"chat-page-{server.port}.png"
        more = [taken] if options.picture else []
        done = subprocess.run(
            ["node", script, given, *more], stdout=subprocess.PIPE, text=True, check=True, timeout=600
        )
    finally:
        server.stop()
    if options.picture:
        Image.open(taken).convert("RGB").save(options.picture, lossless=True, method=6)
        taken.unlink()
    print("| network | files | bytes sent (compressed) | first paint | usable |")
    print("|---|---|---|---|---|")
    for row in json.loads(done.stdout):
        name = f"{row['network']}, again" if row["again"] else row["network"]
        size = f"{row['transferred']:,} ({row['compressed']:,} of {row['plain']:,})"
        print(f"| {name} | {row['files']} | {size} | {row['paint_ms']:.0f} ms | {row['usable_ms']:.0f} ms |")


if __name__ == "__main__":
    main()
