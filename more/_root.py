"""`import _root` in a script of this folder makes the files of the folder above importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
