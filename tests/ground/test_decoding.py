"""Types are prepared for decoding by one thread at a time."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEET = """
import gc, sys, threading, types
from concurrent.futures import ThreadPoolExecutor
from outlast.decoding import convert, from_json

sys.setswitchinterval(1e-6)
gc.set_threshold(1)
TYPES = '''
import dataclasses, msgspec
MARK
class Inner(BASE):
    number: "int"
    words: "tuple[str, ...]" = ()
MARK
class Outer(BASE):
    inner: "Inner"
    many: "tuple[Inner, ...]" = ()
    named: "dict[str, Inner] | None" = None
'''
plain = {"inner": {"number": 1}, "many": [{"number": 2, "words": ["a"]}], "named": {"b": {"number": 3}}}
text = b'{"inner":{"number":1},"many":[{"number":2,"words":["a"]}],"named":{"b":{"number":3}}}'
with ThreadPoolExecutor(3) as pool:
    for turn in range(200):
        sys.modules["met"] = met = types.ModuleType("met")
        forms = ("@dataclasses.dataclass", "object") if turn % 2 else ("", "msgspec.Struct")
        exec(TYPES.replace("MARK", forms[0]).replace("BASE", forms[1]), met.__dict__)
        gate = threading.Barrier(3)

        def meet(how, data, kind):
            gate.wait()
            return how(data, kind)

        asked = [(from_json, text, met.Outer), (from_json, text, met.Outer), (convert, plain, met.Outer)]
        first, second, third = pool.map(lambda one: meet(*one), asked)
        assert first == second == third and first.named["b"].number == 3
print("met")
"""


@pytest.mark.process
@pytest.mark.cold
def test_threads_may_prepare_a_type_concurrently() -> None:
    """Three threads repeatedly decode values of types that no thread has decoded before."""
    done = subprocess.run([sys.executable, "-c", MEET], check=False, capture_output=True, text=True, timeout=250)
    assert done.stdout.strip() == "met", (done.returncode, done.stderr[-2000:])
