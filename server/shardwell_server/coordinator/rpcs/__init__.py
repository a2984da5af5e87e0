"""The rpcs of ``CoordinatorService``, one file per topic. Each decodes its request, calls the core and encodes."""
