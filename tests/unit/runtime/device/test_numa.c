/* Threads are bound to the node of a PCI device, as a folder like /sys describes it. */
#include "runtime/device/numa.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct numa_case {
    char sys[64];
    const char *bus;
    bool is_bound;
    cpu_set_t cpus; /* afterwards */
} numa_case;

static void write_line(const char *sys, const char *name, const char *line)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", sys, name);
    for (char *at = path + strlen(sys) + 1; (at = strchr(at, '/')); at++) {
        *at = '\0';
        (void)mkdir(path, 0700);
        *at = '/';
    }
    FILE *file = fopen(path, "w");
    cr_assert(file);
    fprintf(file, "%s\n", line);
    fclose(file);
}

/* The device of bus 1b is on node 0, which has the first CPU of this process. */
static int make_sys(numa_case *test)
{
    cpu_set_t mine;
    char first[16];
    int cpu = 0;
    cr_assert_eq(sched_getaffinity(0, sizeof mine, &mine), 0);
    while (!CPU_ISSET((size_t)cpu, &mine))
        cpu++;
    snprintf(first, sizeof first, "%d,1022-1023", cpu);
    snprintf(test->sys, sizeof test->sys, "/tmp/test_numa.XXXXXX");
    cr_assert(mkdtemp(test->sys));
    write_line(test->sys, "bus/pci/devices/0000:1b:00.0/numa_node", "0");
    write_line(test->sys, "bus/pci/devices/0000:2b:00.0/numa_node", "-1");
    write_line(test->sys, "bus/pci/devices/0000:3b:00.0/numa_node", "1");
    write_line(test->sys, "bus/pci/devices/0000:4b:00.0/numa_node", "2");
    write_line(test->sys, "devices/system/node/node0/cpulist", first);
    write_line(test->sys, "devices/system/node/node1/cpulist", "1020-1021");
    write_line(test->sys, "devices/system/node/node2/cpulist", "0-1023");
    return cpu;
}

static void *bind_thread(void *context)
{
    numa_case *test = context;
    test->is_bound = fsdp_numa_bind(test->sys, test->bus);
    (void)sched_getaffinity(0, sizeof test->cpus, &test->cpus);
    return NULL;
}

static void bind_in_thread(numa_case *test, const char *bus)
{
    pthread_t thread;
    test->bus = bus;
    cr_assert_eq(pthread_create(&thread, NULL, bind_thread, test), 0);
    pthread_join(thread, NULL);
}

static void remove_sys(const numa_case *test)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", test->sys);
    cr_assert_eq(system(command), 0);
}

/* A thread with one CPU has no other node to leave. */
Test(numa, a_thread_moves_to_the_cpus_of_its_gpu)
{
    numa_case test;
    cpu_set_t mine;
    const int cpu = make_sys(&test);
    cr_assert_eq(sched_getaffinity(0, sizeof mine, &mine), 0);
    bind_in_thread(&test, "0000:1B:00.0"); /* as CUDA spells it */
    remove_sys(&test);
    cr_assert_eq(test.is_bound, CPU_COUNT(&mine) > 1);
    cr_assert_eq(CPU_COUNT(&test.cpus), 1);
    cr_assert(CPU_ISSET((size_t)cpu, &test.cpus));
}

Test(numa, a_thread_stays_where_nothing_is_known_or_gained)
{
    static const char *const buses[] = {"0000:2B:00.0", "0000:3B:00.0", "0000:4B:00.0",
                                        "0000:5B:00.0"};
    numa_case test;
    cpu_set_t mine;
    (void)make_sys(&test);
    cr_assert_eq(sched_getaffinity(0, sizeof mine, &mine), 0);
    for (size_t i = 0; i < sizeof buses / sizeof *buses; i++) {
        bind_in_thread(&test, buses[i]);
        cr_assert_not(test.is_bound, "%s", buses[i]);
        cr_assert(CPU_EQUAL(&test.cpus, &mine), "%s", buses[i]);
    }
    remove_sys(&test);
}
