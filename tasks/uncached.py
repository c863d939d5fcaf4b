"""Prefect's task decorator without its cache: what is done is remembered by commits and result files, which a resumed run reads."""

from functools import partial

import prefect
from prefect.cache_policies import NO_CACHE

task = partial(prefect.task, cache_policy=NO_CACHE)
