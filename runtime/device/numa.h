/* Binds a thread to the CPUs and the memory near a GPU, on hosts with several NUMA nodes. */
#ifndef FSDP_NUMA_H
#define FSDP_NUMA_H

#include <stdbool.h>

/* Binds the calling thread, and threads that it creates later, to those of its CPUs that are on the node
 * of the PCI device `bus` ("0000:1b:00.0"), and makes that node the first choice for its memory. sys:
 * "/sys". False when nothing was done: one node, an unknown device, none of the thread's CPUs on the node,
 * or a program such as numactl that has chosen the memory already. */
bool fsdp_numa_bind(const char *sys, const char *bus);

#endif
