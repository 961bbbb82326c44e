"""Comparisons that guides have published: predicted at full scale, and run at a small scale on this machine.

`study.py` says what a study is and runs it, `guides.py` has the studies, `jobs.py` their models and data.
"""

from brimful.studies.guides import STUDIES, find_study
from brimful.studies.study import Case, Study, run_study

__all__ = ["STUDIES", "Case", "Study", "find_study", "run_study"]
