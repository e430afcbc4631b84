"""Rendering of a chat template, as a program: a template can need any time and memory.

It reads a JSON object from standard input, with the arguments of `render_jinja_template` of
transformers and the limits, and writes the texts, or an error, to standard output. It imports
nothing of ours, so that it starts without PyTorch.
"""

import json
import resource
import sys
import time
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template


def _set_limits(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process to more time and memory than it has needed so far."""
    seconds = int(time.process_time()) + 1 + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems have no reliable limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> None:
    """Render the conversations of standard input; a lack of memory ends the process."""
    request = json.load(sys.stdin)
    _set_limits(request["cpu_seconds"], request["memory_bytes"])
    try:
        texts, _ = render_jinja_template(**request["arguments"])
        if sum(map(len, texts)) > request["max_chars"]:
            raise ValueError(f"its texts have more than {request['max_chars']} characters")
        result: dict[str, object] = {"texts": texts}
    except MemoryError:
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - templates raise what they like
        result = {"error": str(error)[:200]}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
