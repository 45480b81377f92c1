"""The paper's tables and figures and the map: grids, trials, records, statistics and pages."""
