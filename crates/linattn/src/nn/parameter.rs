//! Kinds of parameters. The layer that holds a parameter declares its kind by its type.

/// Layers with one matrix, `weight`, as Burn's visitors spell their types. It may be quantised, and have an adapter.
const PROJECTIONS: [&str; 3] = ["Struct:Linear", "Struct:ResidualLinear", "Struct:ScaledLinear"];

/// Layers whose `weight` is several matrices.
const SEVERAL_MATRICES: [&str; 2] = ["Struct:BlockDiagonal", "Struct:HeadMaps"];

/// Whether the parameter `name` of a `container` is the matrix of a projection.
pub(crate) fn is_projection(container: &str, name: &str) -> bool {
    name == "weight" && PROJECTIONS.contains(&container)
}

/// Kind of a parameter: a matrix decays by custom, others do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// A weight that multiplies vectors of activations.
    Matrix,
    /// Numbers for each channel or head, of any rank: biases, weights of norms, rates, shares, taps of short
    /// convolutions.
    Vector,
    /// Rows of a table.
    Embedding,
}

impl ParamKind {
    /// The kind of the parameter `name` of a `container`, both as
    /// [`enter_module`](burn::module::ModuleVisitor::enter_module) gives them.
    pub fn of(container: &str, name: &str) -> Self {
        match container {
            "Struct:Embedding" => Self::Embedding,
            "Struct:LowRankAdapter" => Self::Matrix,
            _ if is_projection(container, name) => Self::Matrix,
            _ if name == "weight" && SEVERAL_MATRICES.contains(&container) => Self::Matrix,
            _ => Self::Vector,
        }
    }
}
