"""tools/smollm2.py needs requirements-smollm2.txt: without it its tests are not collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("gguf") else ["test_smollm2.py"]
