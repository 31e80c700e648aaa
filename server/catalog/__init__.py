"""Resources that the operator registers for all tenants: base models and calibrations."""
