"""Resources that the operator registers for all tenants: base models, calibrations and runner builds."""
