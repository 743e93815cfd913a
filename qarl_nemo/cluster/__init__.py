"""Ray clusters for the scale-out engine: started on hosts, Slurm or Kubernetes, checked, watched, their logs kept."""
