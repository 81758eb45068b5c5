"""Defects of the service that the attack tests must detect, at least one for each test file.

    .venv/bin/python -m tests.system.attacks.defects          seed each one into a copy of the tree
    .venv/bin/python -m tests.system.attacks.defects framing  only those of test_framing.py

Each line of the output names the first test that failed. Exits with 1 if the tests miss a defect.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("appliance", "console", "engine", "kernels", "store", "tests", "pyproject.toml")
SOME_FAILED = 1
"""pytest's exit code for failed tests."""


class Defect(NamedTuple):
    """A defect that is put into the service's source."""

    tests: str
    """The part NAME of the test file's name, `test_NAME.py`."""
    name: str
    source: str
    right: str
    """Correct source text. It occurs in the file exactly once."""
    wrong: str
    keyword: str
    """pytest's -k expression for the tests that must detect the defect."""

    def seeded(self, text: str) -> str:
        """Return the source with the defect in it. Raises ValueError unless the text to replace occurs
        exactly once."""
        if text.count(self.right) != 1:
            raise ValueError(f"{self.name}: found {text.count(self.right)} times in {self.source}")
        return text.replace(self.right, self.wrong)


DEFECTS = (
    Defect(
        "event_loop",
        "the numbers with a fraction in a body have no bound",
        "appliance/front/body.py",
        "if self._left < 0:",
        "if False:",
        "too and small",
    ),
    Defect(
        "templates",
        "rendered text is not counted",
        "appliance/front/tokenization.py",
        "memory + text_bytes([text])",
        "memory",
        "rendered_text",
    ),
    Defect(
        "bodies",
        "the bodies of one tenant have no bound",
        "appliance/front/body_budget.py",
        "if held + size > tenant_limit:",
        "if False:",
        "bodies_of_a_tenant",
    ),
    Defect(
        "checkpoints",
        "a template that does not compile raises an unexpected error",
        "appliance/text/template_process.py",
        "except Exception as error:\n                self.close()",
        "except OSError as error:\n                self.close()",
        "bad_files",
    ),
    Defect(
        "command_line",
        "the user of the process behind a socket is not checked",
        "appliance/ownership.py",
        "    _, uid, _ = UCRED.unpack(",
        "    return\n    _, uid, _ = UCRED.unpack(",
        "another_users_process",
    ),
    Defect(
        "connections",
        "the readiness of a model needs no key",
        "appliance/front/health.py",
        "if identity is None:\n            raise unauthorized(",
        "if False:\n            raise unauthorized(",
        "readiness",
    ),
    Defect(
        "databases",
        "a deleted database is not noticed",
        "store/writer.py",
        "(description := self._database.displaced())",
        '(description := "")',
        "deleted_databases",
    ),
    Defect(
        "event_loop",
        "an answer of /tokenize has no bound",
        "appliance/front/length_limits.py",
        "MAX_TOKENS_SHOWN = 524_288",
        "MAX_TOKENS_SHOWN = 1 << 30",
        "too and many and tokens",
    ),
    Defect(
        "framing",
        "a request without Host is served",
        "appliance/http/heads.py",
        "if not hosts and version",
        "if False and version",
        "needs_a_host",
    ),
    Defect(
        "logging",
        "each thread writes its own log lines",
        "engine/logs.py",
        "self.queue.put_nowait(record)",
        "import os; os.write(2, record)",
        "stalled_reader",
    ),
    Defect(
        "machine_faults",
        "a jump of the clock is not noticed",
        "appliance/core/clock.py",
        "MIN_JUMP_S = 600.0",
        "MIN_JUMP_S = 1e12",
        "jumps_of_the_clock",
    ),
    Defect(
        "memory_limit",
        "the cause of a kill for lack of memory is not given",
        "engine/memory_kills.py",
        "if killed <= 0:",
        "if killed >= 0:",
        "killed_for_lack_of_memory",
    ),
    Defect(
        "prompts",
        "a word of any length is encoded in one step",
        "appliance/text/encoder.py",
        "MAX_UNCUT_BYTES = 512 << 10",
        "MAX_UNCUT_BYTES = 1 << 30",
        "one_long_step",
    ),
    Defect(
        "replica_memory",
        "all of the KV cache occupies memory from the start",
        "engine/kv_memory.py",
        "            return self._decoder.allocate_kv(self.blocks, self._memory.zeroed_kv)\n"
        "        except OSError",
        "            pools = self._decoder.allocate_kv(self.blocks, self._memory.zeroed_kv)\n"
        "            [part.fill_(0) for pool in pools for part in pool.tensors()]\n"
        "            return pools\n        except OSError",
        "memory_rises",
    ),
    Defect(
        "replicas",
        "long steps are not announced",
        "engine/leader.py",
        "if expected_s > HEARTBEAT_S:",
        "if False:",
        "longer_than_the_deadline",
    ),
    Defect(
        "templates",
        "a template may use any amount of memory",
        "appliance/text/template_worker.py",
        '        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + memory,\n',
        "",
        "hungry",
    ),
)


def main(words: list[str]) -> int:
    """Seed the defects of the given test files, or all defects if none is given. Return how many of them the
    tests missed."""
    missed = 0
    for defect in DEFECTS:
        if words and defect.tests not in words:
            continue
        failed = _failed_test(defect)
        missed += not failed
        print(f"{'ok' if failed else 'MISSED':8}test_{defect.tests}: {defect.name}: {failed}", flush=True)
    return min(missed, 1)


def _failed_test(defect: Defect) -> str:
    """Run the tests with the defect in a copy of the tree. Return the test that failed, or ""."""
    with tempfile.TemporaryDirectory(prefix="seeded-") as folder:
        tree, skip = Path(folder), shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=skip)
            else:
                shutil.copy(ROOT / name, tree / name)
        source = tree / defect.source
        source.write_text(defect.seeded(source.read_text()))
        tests = f"tests/system/attacks/test_{defect.tests}.py"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            tests,
            "-k",
            defect.keyword,
        ]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"^(?:FAILED|ERROR) \S+::(\w+)", ran.stdout, re.MULTILINE)
    return found[1] if found and ran.returncode == SOME_FAILED else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
