/* See numa.h. The kernel's calls are used as they are, since libnuma would be a dependency for two of
 * them. */
#include "runtime/device/numa.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_NODES = 1024, WORD_BITS = 8 * sizeof(unsigned long) };

/* The first line of a file, without its end. */
static bool read_line(const char *path, char *out, size_t out_size)
{
    FILE *file = fopen(path, "re");
    const bool is_read = file && fgets(out, (int)out_size, file);
    if (file)
        fclose(file);
    if (is_read)
        out[strcspn(out, "\n")] = '\0';
    return is_read;
}

/* "1", "-1" where the machine does not tell; the kernel writes PCI addresses in lower case. */
static int node_of(const char *sys, const char *bus)
{
    char path[256], lower[32] = "", line[32];
    for (size_t i = 0; bus[i] != '\0' && i + 1 < sizeof lower; i++)
        lower[i] = bus[i] >= 'A' && bus[i] <= 'F' ? (char)(bus[i] - 'A' + 'a') : bus[i];
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/numa_node", sys, lower);
    const long node = read_line(path, line, sizeof line) ? strtol(line, NULL, 10) : -1;
    return node >= 0 && node < MOST_NODES ? (int)node : -1;
}

/* Reads a list of numbers such as "0-3,8"; false for another text. */
static bool read_cpus(const char *list, cpu_set_t *cpus)
{
    CPU_ZERO(cpus);
    while (*list != '\0') {
        char *end;
        long first = strtol(list, &end, 10), last = first;
        if (end == list)
            return false;
        if (*end == '-')
            last = strtol(end + 1, &end, 10);
        for (long cpu = first; cpu >= 0 && cpu <= last && cpu < CPU_SETSIZE; cpu++)
            CPU_SET((size_t)cpu, cpus);
        list = *end == ',' ? end + 1 : end;
        if (list == end && *end != '\0')
            return false;
    }
    return true;
}

/* The CPUs of a node that the thread may use, when those are not all that it may use. */
static bool find_near(const char *sys, int node, cpu_set_t *near)
{
    char path[256], list[1024];
    cpu_set_t mine, of_node;
    snprintf(path, sizeof path, "%s/devices/system/node/node%d/cpulist", sys, node);
    if (!read_line(path, list, sizeof list) || !read_cpus(list, &of_node) ||
        sched_getaffinity(0, sizeof mine, &mine) != 0)
        return false;
    CPU_AND(near, &mine, &of_node);
    return CPU_COUNT(near) > 0 && CPU_COUNT(near) < CPU_COUNT(&mine);
}

static bool has_policy(void)
{
    int mode = MPOL_DEFAULT;
    return syscall(SYS_get_mempolicy, &mode, NULL, 0, NULL, 0) == 0 && mode != MPOL_DEFAULT;
}

bool fsdp_numa_bind(const char *sys, const char *bus)
{
    const int node = node_of(sys, bus);
    unsigned long nodes[MOST_NODES / WORD_BITS] = {0};
    cpu_set_t near;
    if (node < 0 || has_policy() || !find_near(sys, node, &near) ||
        sched_setaffinity(0, sizeof near, &near) != 0)
        return false;
    nodes[(size_t)node / WORD_BITS] |= 1UL << (size_t)node % WORD_BITS;
    /* A node without memory of its own keeps the usual policy: its CPUs are bound anyway. */
    (void)!syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes, (unsigned long)MOST_NODES);
    return true;
}
