# FSDP_WITH_CUDA and FSDP_WITH_NCCL: the toolkit and NCCL must be there, and programs that call them must
# compile and link. So far nothing of ours calls them: the options prove that a machine is ready, and
# --version says what was found. Sets FSDP_CUDA_VERSION and FSDP_NCCL_VERSION, empty without.
include(CheckCSourceCompiles)

set(FSDP_CUDA_VERSION "")
set(FSDP_NCCL_VERSION "")

# fsdp_check_links(RESULT SOURCE ADVICE): stops with ADVICE unless the program links with CMAKE_REQUIRED_LIBRARIES.
function(fsdp_check_links result source advice)
    check_c_source_compiles("${source}" ${result})
    if(NOT ${result})
        unset(${result} CACHE)          # once it is installed, the same folder is configured again
        message(FATAL_ERROR "${advice}")
    endif()
endfunction()

if(FSDP_WITH_CUDA OR FSDP_WITH_NCCL)
    find_package(CUDAToolkit 12)
    if(NOT CUDAToolkit_FOUND)
        message(FATAL_ERROR "FSDP_WITH_CUDA or FSDP_WITH_NCCL is ON, and no CUDA toolkit of version 12 or later "
            "was found. Install cuda-nvcc and cuda-cudart-dev (NVIDIA's packages), and put nvcc on PATH or set "
            "CUDAToolkit_ROOT; or leave both options OFF.")
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
        set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
    endif()
    enable_language(CUDA)               # compiles and links a device program
    set(CMAKE_REQUIRED_LIBRARIES CUDA::cudart)
    fsdp_check_links(FSDP_CUDA_LINKS "#include <cuda_runtime.h>
        int main(void) { int count = 0; return (int)cudaGetDeviceCount(&count); }"
        "nvcc is there, but a program that calls cudaGetDeviceCount does not compile and link: install \
cuda-cudart-dev of version ${CUDAToolkit_VERSION}, or leave FSDP_WITH_CUDA OFF.")
    set(FSDP_CUDA_VERSION ${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR})
endif()

if(FSDP_WITH_NCCL)
    find_path(FSDP_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    find_library(FSDP_NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
    if(NOT FSDP_NCCL_INCLUDE OR NOT FSDP_NCCL_LIBRARY)
        message(FATAL_ERROR "FSDP_WITH_NCCL is ON, and nccl.h or libnccl was not found. Install libnccl-dev "
            "(NVIDIA's package), or set FSDP_NCCL_INCLUDE (a directory) and FSDP_NCCL_LIBRARY (a file); or leave "
            "the option OFF.")
    endif()
    set(CMAKE_REQUIRED_INCLUDES ${FSDP_NCCL_INCLUDE})
    set(CMAKE_REQUIRED_LIBRARIES ${FSDP_NCCL_LIBRARY} CUDA::cudart)
    fsdp_check_links(FSDP_NCCL_LINKS "#include <nccl.h>
        int main(void) { int version = 0; return (int)ncclGetVersion(&version); }"
        "a program that calls ncclGetVersion does not compile and link with ${FSDP_NCCL_LIBRARY}: install \
libnccl-dev for CUDA ${FSDP_CUDA_VERSION}, or leave FSDP_WITH_NCCL OFF.")
    file(STRINGS ${FSDP_NCCL_INCLUDE}/nccl.h numbers REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
    string(REGEX REPLACE "[^0-9;]" "" numbers "${numbers}")
    list(JOIN numbers "." FSDP_NCCL_VERSION)
endif()
unset(CMAKE_REQUIRED_INCLUDES)
unset(CMAKE_REQUIRED_LIBRARIES)
