"""Slurm: what a job knows of itself, batch scripts, giving a job back to the queue. Nothing here imports torch."""

from outlast.integrations.slurm.batch_script import BatchScript
from outlast.integrations.slurm.jobs import resolve_resume_path
from outlast.runtime.slurm_job import SLURMInfo, get_slurm_info, is_requeued, log_job_info

__all__ = ["BatchScript", "SLURMInfo", "get_slurm_info", "is_requeued", "log_job_info", "resolve_resume_path"]
