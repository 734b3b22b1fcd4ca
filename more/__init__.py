"""Scripts that go deeper than the post. `from more.x import y` works from the folder above."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # so that they find each other, and _root
