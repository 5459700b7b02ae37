"""Job requests rendered for a scheduler: an sbatch script or Kubernetes manifests."""
