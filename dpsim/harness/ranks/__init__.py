"""What the harness runs on MPI ranks. Imported there only: these modules load MPI."""
