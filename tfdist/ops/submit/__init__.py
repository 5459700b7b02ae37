"""From one request to what a scheduler takes: an sbatch script, or manifests for Kubernetes."""
