"""Where the processes of a run come from: this host, a launcher such as torchrun or a specification, Ray."""
