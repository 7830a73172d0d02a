"""One table of cases for every rule of the proxy, run over raw sockets against ours and against others."""
