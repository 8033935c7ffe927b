//! PTX instructions that CubeCL has no word for.
//!
//! CubeCL writes a comment of several lines between `/*` and `*/`, so [`ptx`] closes the comment before its statement and
//! opens another after it. Operands go by the names that CubeCL gives variables: were these to change, NVRTC would refuse
//! the kernel.

use cubecl::ir::{
    ElemType, FloatKind, Instruction, Metadata, NonSemantic, Operation, Scope, Variable,
    VariableKind,
};
use cubecl::prelude::*;

/// Adds a statement of C++ to a kernel for CUDA.
pub(super) fn ptx(scope: &mut Scope, statement: &str) {
    scope.register(NonSemantic::Comment { content: format!("\n*/ {statement} /*\n") });
}

/// The name of a variable in CUDA's source.
pub(super) fn name(variable: Variable) -> String {
    match variable.kind {
        VariableKind::GlobalInputArray(id) | VariableKind::GlobalOutputArray(id) => {
            format!("buffer_{id}")
        }
        VariableKind::SharedArray { id, .. } => format!("shared_memory_{id}"),
        VariableKind::LocalConst { id } => format!("l_{id}"),
        VariableKind::LocalArray { id, .. } => format!("l_arr_{id}"),
        _ => unreachable!("operands are tensors, tiles, registers and places among them"),
    }
}

/// The name of a new variable that holds what `value` does.
pub(super) fn local(scope: &mut Scope, value: Variable) -> String {
    let local = *scope.create_local(value.ty);
    scope.register(Instruction::new(Operation::Copy(value), local));
    name(local)
}

/// The same number, of which compilers know nothing: what is computed from it is computed where it is used, and not held in
/// registers from before a loop.
#[cube]
pub(crate) fn computed_here(x: u32) -> u32 {
    let mut same = Array::<u32>::new(1usize);
    move_to(&mut same, x);
    same[0]
}

#[cube]
#[allow(unused_variables)] // an intrinsic's
fn move_to(to: &mut Array<u32>, x: u32) {
    intrinsic!(|scope| {
        let (to, x) = (name(*to.expand), local(scope, *x.expand));
        ptx(scope, &format!("asm volatile(\"mov.b32 %0, %1;\" : \"=r\"({to}[0]) : \"r\"({x}));"));
    })
}

/// Makes UNIT_POS a number of which compilers know nothing from before: in a loop, what is computed from it is computed in
/// every round, where registers would hold all of it, or spill it.
#[cube]
pub(crate) fn forget_unit() {
    intrinsic!(|scope| ptx(scope, "asm volatile(\"\" : \"+r\"(threadIdxGlobal));"))
}

/// A barrier of so many of a cube's units, whole planes that start with unit `first`; the others do not meet it. The cube may
/// be in two such parts, each with a barrier of its own.
#[cube]
#[allow(unused_variables)] // an intrinsic's
pub(super) fn sync_some(#[comptime] first: usize, #[comptime] units: usize) {
    intrinsic!(|scope| {
        // That of the whole cube has number 0.
        let barrier = if first == 0 { 1 } else { 2 };
        let what = format!("asm volatile(\"bar.sync {barrier}, {units};\" ::: \"memory\");");
        ptx(scope, &what)
    })
}

/// Two numbers in 16 bits. CubeCL writes one conversion for each, which takes eight times as long as one for both, and NVRTC
/// makes one of two only where neither is used alone.
#[cube]
pub(super) fn rounded_pair<E: Float>(first: f32, second: f32) -> Vector<E, Const<2>> {
    let mut pair = Array::<Vector<E, Const<2>>>::new(1usize);
    round_to::<E>(&mut pair, first, second);
    pair[0]
}

#[cube]
#[allow(unused_variables)] // an intrinsic's
fn round_to<E: Float>(to: &mut Array<Vector<E, Const<2>>>, first: f32, second: f32) {
    intrinsic!(|scope| {
        let to = *to.expand;
        let numbers = sixteen_bits(to.ty.elem_type());
        let word = format!("reinterpret_cast<uint32*>({})[0]", name(to));
        let [first, second] = [*first.expand, *second.expand].map(|x| local(scope, x));
        ptx(
            scope,
            &format!(
                "asm(\"cvt.rn.{numbers}x2.f32 %0, %1, %2;\" : \"=r\"({word}) : \"f\"({second}), \"f\"({first}));"
            ),
        );
    })
}

/// PTX's name of a type of 16 bits.
pub(super) fn sixteen_bits(numbers: ElemType) -> &'static str {
    match numbers {
        ElemType::Float(FloatKind::BF16) => "bf16",
        ElemType::Float(FloatKind::F16) => "f16",
        other => unreachable!("tensor cores take 16 bits here, not {other}"),
    }
}

/// Tells CubeCL that a tile is in use from here on: it gives tiles their places by the instructions that name them.
pub(super) fn use_tile(scope: &mut Scope, tile: Variable) {
    let length = *scope.create_local(u32::as_type_native_unchecked());
    scope.register(Instruction::new(Metadata::Length { var: tile }, length));
}
