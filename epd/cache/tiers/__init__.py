"""The hierarchical cache: device, host, store. Start at epd.cache.tiers.tiered; import the submodules."""
