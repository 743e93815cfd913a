"""Ray clusters for NeMo-RL runs: started on hosts, Slurm or Kubernetes, checked and watched, their logs kept."""
