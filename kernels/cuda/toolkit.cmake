# FSDP_WITH_CUDA: AUTO takes CUDA where it is. The kernels are compiled by nvcc and linked with the static
# runtime of the toolkit. Sets FSDP_CUDA_VERSION, empty without; FSDP_CUDA_TOOLKIT: its headers are there in
# any case.
set(FSDP_CUDA_VERSION "")
set(FSDP_CUDA_TOOLKIT OFF)
set(FSDP_CUDA_LEAST 12.1) # its kernels may have 32,764 bytes of parameters

# fsdp_cuda_missing(OPTION TEXT): stops where OPTION is ON, and says why it is off where it is AUTO.
function(fsdp_cuda_missing option text)
    if(${option} STREQUAL "ON")
        message(FATAL_ERROR "${option} is ON, and ${text}; or leave the option OFF.")
    endif()
    message(STATUS "${option}: off, because ${text}")
endfunction()

if(NOT FSDP_WITH_CUDA STREQUAL "OFF")
    find_package(CUDAToolkit ${FSDP_CUDA_LEAST} QUIET)
    if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE AND TARGET CUDA::cudart_static)
        set(FSDP_CUDA_TOOLKIT ON)
    endif()
endif()

set(FSDP_CUDA_SOURCES kernels/cuda/arith.cu kernels/cuda/box.cu kernels/cuda/clip.cu kernels/cuda/hash.cu
    kernels/cuda/norm.cu kernels/cuda/optim.cu kernels/cuda/rects.cu)

# --- CUDA -----------------------------------------------------------------------------------------

# The processors: A100, H100 and H200 with their own instructions; others from 8.0 compile PTX when they
# load it. Machine code is compressed to a fifth, as PTX is anyway.
set(FSDP_CUDA_FLAGS -std=c++17 -O3 -fmad=false
    -gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90a,code=sm_90a
    -Xptxas=-v -Xfatbin=-compress-all
    -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics
    -Xcompiler=-Wall,-Wextra,-ffp-contract=off,-fstack-protector-strong -D_GNU_SOURCE
    -I${PROJECT_SOURCE_DIR} -I${PROJECT_BINARY_DIR}/include)
if(FSDP_WARNINGS_AS_ERRORS)
    list(APPEND FSDP_CUDA_FLAGS -Werror=all-warnings)
endif()

# True where nvcc and the compiler of the host that it takes make an object: cached, for it takes seconds.
function(fsdp_cuda_compiles result)
    if(NOT DEFINED FSDP_CUDA_COMPILES)
        set(probe ${PROJECT_BINARY_DIR}/CMakeFiles/fsdp_cuda_probe.cu)
        file(WRITE ${probe} "__global__ void probe(const __grid_constant__ int n) { (void)n; }\n")
        execute_process(COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} ${FSDP_CUDA_FLAGS} -c ${probe} -o ${probe}.o
            RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
        if(code EQUAL 0)
            set(FSDP_CUDA_COMPILES ON CACHE INTERNAL "")
        endif()
        set(FSDP_CUDA_OUTPUT "${output}" PARENT_SCOPE)
    endif()
    set(${result} ${FSDP_CUDA_COMPILES} PARENT_SCOPE)
endfunction()

if(NOT FSDP_WITH_CUDA STREQUAL "OFF")
    set(advice "Install cuda-nvcc and cuda-cudart-dev (NVIDIA's packages), and put nvcc on PATH or set \
CUDAToolkit_ROOT")
    if(NOT FSDP_CUDA_TOOLKIT)
        fsdp_cuda_missing(FSDP_WITH_CUDA
            "no CUDA toolkit of version ${FSDP_CUDA_LEAST} or later was found. ${advice}")
    elseif(FSDP_WITH_CUDA STREQUAL "AUTO" AND (FSDP_SANITIZE OR FSDP_COVERAGE))
        message(STATUS "FSDP_WITH_CUDA: off with sanitizers and coverage, which do not see nvcc's objects")
    else()
        fsdp_cuda_compiles(compiles)
        if(compiles)
            set(FSDP_CUDA_VERSION ${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR})
        else()
            fsdp_cuda_missing(FSDP_WITH_CUDA "${CUDAToolkit_NVCC_EXECUTABLE} does not compile a kernel: \
${FSDP_CUDA_OUTPUT} Install a compiler for the host that this nvcc knows, and name it in NVCC_CCBIN")
        endif()
    endif()
endif()

# fsdp_cuda_objects(OBJECTS_OUT FILE...): objects of kernels. Beside each lie its PTX and what ptxas said
# about its kernels (registers, spills), for tests/cuda/compiled.py.
function(fsdp_cuda_objects objects_out)
    set(folder ${PROJECT_BINARY_DIR}/CMakeFiles/fsdp_cuda.dir)
    foreach(file IN LISTS ARGN)
        set(object ${folder}/${file}.o)
        get_filename_component(name ${file} NAME_WE)
        cmake_path(GET object PARENT_PATH directory)
        set(kept ${directory}/${name}_kept)
        file(MAKE_DIRECTORY ${kept})
        add_custom_command(OUTPUT ${object} DEPFILE ${object}.d VERBATIM
            DEPENDS ${PROJECT_SOURCE_DIR}/${file} ${PROJECT_SOURCE_DIR}/kernels/cuda/compile.sh
            COMMENT "Building CUDA object ${file}.o"
            COMMAND ${PROJECT_SOURCE_DIR}/kernels/cuda/compile.sh ${object} ${kept}
                ${CUDAToolkit_NVCC_EXECUTABLE} ${FSDP_CUDA_FLAGS} ${PROJECT_SOURCE_DIR}/${file})
        list(APPEND objects ${object})
    endforeach()
    set(${objects_out} ${objects} PARENT_SCOPE)
endfunction()
