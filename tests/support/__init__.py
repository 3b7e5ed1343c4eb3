"""What several tests share: the float64 reference, cases, tolerances, stand-ins for devices and
ranks."""
