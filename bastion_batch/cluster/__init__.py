"""Ray: workers that decode units, the coordinator that leases them, the driver of a job."""
