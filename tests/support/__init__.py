"""What several tests share: models, data, jobs, programs, the driver without a GPU."""
