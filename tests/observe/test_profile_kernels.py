# ruff: noqa: E501
"""The tables that say what a kernel or an operator does, on the names that libraries give them."""

import pytest

from shoal.observe.profile.classify import kernel_kind, operator_kind

KERNELS = {
    "matmul": [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT",
        "nvjet_tst_192x192_64x4_2x1_v_bz_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "ampere_sgemm_128x64_nn",
        "volta_sgemm_32x128_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_tn_align8>(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_tn_align8::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, false>(cublasLt::cublasSplitKParams<float>, float const*, __nv_bfloat16 const*)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false, cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<float const>, cublasGemvTensorStridedBatched<float const>, cublasGemvTensorStridedBatched<float>, float> >",
        "triton_tem_fused_addmm_7",
        "triton_tem_fused_mm_2",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8>>>",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>, false, true, false, false, false, true, false, false>(pytorch_flash::Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>, false, true>(pytorch_flash::Flash_bwd_params)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8>>(pytorch_flash::Flash_bwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>>>>>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, cutlass::arch::Sm80, true, 64, 64, 64, true, true>::Params)",
        "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float, cutlass::arch::Sm80, true, false, false, 64, 64, 64, false>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x64_1x4x1_cga1x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_2",
        "triton_tem_fused_flex_attention_backward_5",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4> >",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>",
        "triton_poi_fused__to_copy_mul_silu_4",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_clone_transpose_1",
        "triton_per_fused_addmm_native_layer_norm_3",
        "_measure_row",
        "_cast_tile",
        "_dequantize",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double, double, double, double, double, bool, float const*, float const*>",
        "_adamw",
        "_lion",
    ],
    "communication": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "Memcpy PtoP (Device -> Device)",
    ],
    "copy": [
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
    ],
}
OPERATORS = {
    "matmul": ["aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "aten::_scaled_mm", "aten::mv"],
    "attention": [
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    "elementwise": [
        "aten::mul",
        "aten::copy_",
        "aten::_softmax",
        "aten::mul_",
        "fsdp::all_gather_copy_in",
        "aten::mm2",
    ],
    "communication": ["c10d::allreduce_", "c10d::_allgather_base_", "gloo:all_reduce", "_c10d_functional::all_reduce"],
    None: ["MmBackward0", "autograd::engine::evaluate_function: AddmmBackward0", "FSDP::pre_forward (0)"],
}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_is_known_by_its_name(kind: str) -> None:
    assert {name: kernel_kind(name) for name in KERNELS[kind]} == dict.fromkeys(KERNELS[kind], kind)


@pytest.mark.parametrize("kind", OPERATORS)
def test_an_operator_is_known_by_its_name(kind: str | None) -> None:
    assert {name: operator_kind(name) for name in OPERATORS[kind]} == dict.fromkeys(OPERATORS[kind], kind)
