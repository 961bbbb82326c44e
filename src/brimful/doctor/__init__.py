"""Watch a training run: what holds its memory, where its time goes, what is wrong with it.

Start reading at `script.run_script`. `watch.Watch` follows a run, with `recording.WatchedOps` for its ops;
`evidence.Evidence` is what was seen.
"""

from brimful.doctor.evidence import Evidence
from brimful.doctor.explain import explain_out_of_memory
from brimful.doctor.findings import Finding, findings
from brimful.doctor.script import ScriptRun, run_script
from brimful.doctor.shown import ShownWatch
from brimful.doctor.text import watched_document, watched_text
from brimful.doctor.watch import STEPS, Watch

__all__ = [
    "STEPS",
    "Evidence",
    "Finding",
    "ScriptRun",
    "ShownWatch",
    "Watch",
    "explain_out_of_memory",
    "findings",
    "run_script",
    "watched_document",
    "watched_text",
]
