"""Slurm: job information, batch scripts, and requeueing of a job. Nothing here imports torch."""

from outlast.integrations.slurm.batch_script import BatchScript
from outlast.integrations.slurm.jobs import resolve_resume_path
from outlast.runtime.slurm_job import SLURMInfo, get_slurm_info, is_requeued, log_job_info

__all__ = ["BatchScript", "SLURMInfo", "get_slurm_info", "is_requeued", "log_job_info", "resolve_resume_path"]
