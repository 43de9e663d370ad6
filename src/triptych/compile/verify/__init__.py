"""Hold each part against its twin; gates, evidence."""

from triptych.compile.verify.against import check_reference, need_reference
from triptych.compile.verify.prompts import Prompt, prompts_for
from triptych.compile.verify.twin import Twin
from triptych.compile.verify.verification import Candidate, Verification

__all__ = ["Candidate", "Prompt", "Twin", "Verification", "check_reference", "need_reference", "prompts_for"]
