/*
 * HDF5 alone, as the peer of bench compress: writes f32 values by H5Dwrite with byte shuffle and the
 * zstd filter at level 1, in chunks of 1 MiB. The filter comes from HDF5_PLUGIN_PATH, as for any program.
 * The values are read back and compared, outside the time.
 *
 * usage: hdf5_filter_peer VALUES FILE.h5     prints "SECONDS PROCESSOR_SECONDS STORED_BYTES"
 */
#include <hdf5.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { ZSTD_FILTER = 32015, CHUNK_ELEMENTS = (1 << 20) / 4 };

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static float *read_values(const char *path, hsize_t *count_out)
{
    struct stat found;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &found) != 0)
        return NULL;
    size_t size = (size_t)found.st_size / 4 * 4;
    float *values = malloc(size);
    if (values && fread(values, 1, size, file) != size) {
        free(values);
        values = NULL;
    }
    fclose(file);
    *count_out = size / 4;
    return values;
}

static hid_t create_dataset(hid_t file, hsize_t count)
{
    hsize_t chunk = count < CHUNK_ELEMENTS ? count : CHUNK_ELEMENTS;
    unsigned level = 1;
    hid_t space = H5Screate_simple(1, &count, NULL), list = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(list, 1, &chunk);
    H5Pset_shuffle(list);
    hid_t dataset = H5I_INVALID_HID;
    if (H5Pset_filter(list, ZSTD_FILTER, H5Z_FLAG_MANDATORY, 1, &level) >= 0)
        dataset = H5Dcreate2(file, "values", H5T_IEEE_F32LE, space, H5P_DEFAULT, list, H5P_DEFAULT);
    H5Pclose(list);
    H5Sclose(space);
    return dataset;
}

/* Writes and closes the file; returns the stored bytes, 0 for failure. */
static hsize_t write_values(const char *path, const float *values, hsize_t count)
{
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t dataset = create_dataset(file, count);
    if (H5Dwrite(dataset, H5T_IEEE_F32LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) < 0)
        return 0;
    hsize_t stored = H5Dget_storage_size(dataset);
    return H5Dclose(dataset) >= 0 && H5Fclose(file) >= 0 ? stored : 0;
}

static int is_equal(const char *path, const float *values, hsize_t count)
{
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t dataset = H5Dopen2(file, "values", H5P_DEFAULT);
    float *found = malloc(count * sizeof *found);
    int equal = found &&
                H5Dread(dataset, H5T_IEEE_F32LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, found) >= 0 &&
                memcmp(found, values, count * sizeof *found) == 0;
    free(found);
    H5Dclose(dataset);
    H5Fclose(file);
    return equal;
}

int main(int argc, char **argv)
{
    hsize_t count = 0;
    if (argc != 3)
        return 2;
    float *values = read_values(argv[1], &count);
    if (!values || count == 0)
        return 3;
    double began = now(CLOCK_MONOTONIC), cpu_began = now(CLOCK_PROCESS_CPUTIME_ID);
    hsize_t stored = write_values(argv[2], values, count);
    double seconds = now(CLOCK_MONOTONIC) - began;
    double cpu = now(CLOCK_PROCESS_CPUTIME_ID) - cpu_began;
    if (stored == 0 || !is_equal(argv[2], values, count))
        return 1;
    printf("%.6f %.6f %llu\n", seconds, cpu, (unsigned long long)stored);
    free(values);
    return 0;
}
