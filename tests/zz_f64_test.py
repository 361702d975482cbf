from test_train import *
from test_train import first_update, distance
def test_x(settings,tmp_path):
    f={s: first_update(settings(tmp_path/s,f"schedule={s}","model.dtype=float64")) for s in SCHEDULES}
    for s in SCHEDULES: print(s,f[s][0]["grad_norm"],f[s][0]["reward_mean"],f[s][0]["ratio_error"], distance(f[s][1],f["native"][1]))
    d=(f["reweight"][1]-f["native"][1]); print(d.abs().topk(10), f["native"][1].abs().topk(10)); 
    i=d.abs().topk(5).indices; print(f["native"][1][i],f["reweight"][1][i]); print(f["native"][1].norm())
